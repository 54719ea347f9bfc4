"""Which turn runs where and when: a pure core, and a shell that acts it out."""
