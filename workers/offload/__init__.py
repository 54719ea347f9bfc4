"""Work that may take long, in processes of ours."""
