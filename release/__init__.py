"""What a release is made of: the lock, the licences of the dependencies, wheel, sources, SBOM and checksums."""
