"""The databases that a store can stand on, and who may write to them."""
