"""Publishing weights: manifests, blocks, checksums, compression of updates, transports."""
