"""The place of recall evaluation, which is not written yet: see the README for what exists."""
