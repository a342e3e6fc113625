"""What a benchmark asks: each module makes one data set's requests, pure and seeded."""
