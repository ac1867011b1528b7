"""What `kvsm check` explores: each world and each protocol, within bounds."""
