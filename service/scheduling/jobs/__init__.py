"""The turns of jobs: what each is asked, its attempts, and its record."""
