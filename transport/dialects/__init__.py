"""What engines' servers say in their own words."""
