"""Where mathematics meets data: the learning loop and the final solve."""
