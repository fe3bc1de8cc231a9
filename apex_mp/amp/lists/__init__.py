"""Which function runs in which precision: the whole policy, as data for each library."""
