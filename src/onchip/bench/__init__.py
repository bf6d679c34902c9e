"""What `onchip bench` runs: suites of Problems, the peers, the clock, and the pages made from the result."""
