"""What commands show: live views, tables, and words that a terminal may take."""
