"""Agents on GPUs from Python: checkpoints on lanes behind one queue (specification, "Inference engine")."""
