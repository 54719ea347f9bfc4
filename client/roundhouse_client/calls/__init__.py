"""Every request that Roundhouse answers, each as one value: its path, its body, and how the answer is read."""
