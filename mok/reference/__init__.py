"""What the fast code is checked against: loops that fix the order of every sum, and import nothing that they check."""
