"""Files: written whole or not at all, sealed with a digest, and read only where they are what they seem."""
