"""Jobs: their values, their documents, whose turn it is and what it is asked, and what is recorded. Pure."""
