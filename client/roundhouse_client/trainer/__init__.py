"""A trainer's side of weight updates while engines work, for training loops in ordinary code.

It needs only httpx; broadcasting needs torch (``torch.distributed`` with gloo), which is imported then. Every wait has
a limit, and no call that an engine may have begun is sent twice.
"""
