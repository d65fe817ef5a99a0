"""Recipes that ship with linearize, as YAML."""
