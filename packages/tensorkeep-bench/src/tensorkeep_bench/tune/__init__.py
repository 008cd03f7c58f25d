"""Tuning: measure this machine for some seconds and choose settings."""
