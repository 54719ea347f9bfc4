"""The values of a job: agents, conversations, conditions of an end, validations, words. Pure."""
