"""Agents on GPUs from Python: checkpoints on lanes behind one queue (specification, "Inference engine").

Its queue is not the scheduler's, since the core would need a branch for this kind of work in three places. With
``fcfs`` a run starts after all that came before it, of whatever model: the core has a queue for each model, so that
turns of a full model are never scanned, and a policy orders within one. A run goes back to the lane that its agent was
on last, or else to the one that its checkpoint is pinned to: the core knows caches and no pins. And a run whose engine
has failed keeps its place in the order of arrival, where a turn goes ahead of all that were on no slot. Lanes, engines,
requests and their endings are those of jobs.
"""
