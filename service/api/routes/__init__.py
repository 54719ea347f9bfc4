"""The routes of Roundhouse's own API, a file for each resource."""
