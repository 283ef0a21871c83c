"""The only judge of a run: statistics of its records, rules over them, and verification of what they predict."""
