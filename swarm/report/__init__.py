"""What a run came to, in numbers and pictures."""
