"""Requests at the door: relayed to engines through the same queue and slots as the turns of jobs, and never stored."""
