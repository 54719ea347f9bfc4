"""What commands do, a file for each or for a group of them."""
