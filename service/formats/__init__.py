"""External formats: YAML and JSON documents, faults in them, hosts, signatures."""
