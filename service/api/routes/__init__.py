"""The routes of Roundhouse's own surface, a file for each resource."""
