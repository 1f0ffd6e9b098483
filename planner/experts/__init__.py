"""Which expert-parallel rank holds which experts under an uneven load."""
