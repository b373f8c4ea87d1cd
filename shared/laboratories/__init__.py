"""What a lesson's checks observe an answer in: nets, recorders, ranks under observation."""
