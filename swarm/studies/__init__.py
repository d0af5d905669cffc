"""Studies of many searches: run each in a separate process and compare their results."""
