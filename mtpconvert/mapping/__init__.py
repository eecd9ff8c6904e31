"""What equals what: mapping files, their expansion on a real config, and the proof that it is a bijection."""
