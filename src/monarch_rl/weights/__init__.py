"""How weights travel: manifests, blocks, checksums, compression of updates, transports."""
