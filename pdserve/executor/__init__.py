"""How steps reach the ranks of an engine: one seam, several ways."""
