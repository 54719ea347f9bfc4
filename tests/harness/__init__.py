"""Shared by the tests: engines that fail on demand, a service to talk to, virtual time, waiting, audits."""
