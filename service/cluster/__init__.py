"""A cluster of nodes that one command starts: on this machine, over ssh, or by Slurm, Ray or Kubernetes."""
