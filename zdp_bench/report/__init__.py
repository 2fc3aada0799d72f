"""Records -> tables -> figures. Reads files, never trains."""
