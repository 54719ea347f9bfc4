"""Slow work, in processes of ours."""
