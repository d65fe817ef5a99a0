"""Recall evaluation: what a converted model can no longer recall, measured beside its teacher."""
