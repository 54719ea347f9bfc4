"""Other people's forms: YAML and JSON documents, faults in them, hosts, signatures."""
