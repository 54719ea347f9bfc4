"""A trainer's side of weights that change while the engines work: for training loops, which are ordinary code.

It needs httpx alone; broadcasting needs torch (``torch.distributed`` with gloo), which is imported then. Every wait has
a limit, and no call that an engine may have begun is ever sent twice.
"""
