"""Recall evaluation for converted models."""
