"""Which acts go with a feeling, so that because and although make sense."""

LEADS_TO: dict[str, tuple[str, ...]] = {
    "tired": ("fall asleep", "sleep", "sit", "drink", "wait", "come back"),
    "happy": ("sing", "dance", "laugh", "thank", "invite", "call", "help", "give", "show", "swim"),
    "sad": ("cry", "call", "wait", "write", "go", "come back", "ask"),
    "sick": ("sleep", "call", "ask", "wait", "drink"),
    "hungry": ("eat", "cry", "ask", "go", "come back", "call"),
}
HINDERS: dict[str, tuple[str, ...]] = {
    "tired": ("work", "dance", "swim", "repair", "clean", "tidy up", "wash", "carry", "get up"),
    "happy": ("cry", "sell", "go"),
    "sad": ("sing", "dance", "laugh", "congratulate", "invite", "listen to", "meet"),
    "sick": ("work", "swim", "run", "repair", "visit", "bring", "pick up", "get up", "wash"),
    "hungry": ("sleep", "work", "sing", "read", "draw", "help", "fall asleep", "dance"),
}
COMES_FROM: dict[str, tuple[str, ...]] = {
    "tired": ("work", "dance", "swim", "clean", "repair", "carry", "wash", "tidy up"),
    "happy": ("find", "meet", "buy", "visit", "sleep", "dance", "see", "come back", "arrive"),
    "sad": ("lose", "forget", "sell", "cry"),
    "sick": ("swim", "eat", "drink", "work"),
    "hungry": ("work", "swim", "dance", "run"),
}
DESPITE: dict[str, tuple[str, ...]] = {
    "tired": ("sleep", "drink", "sit"),
    "happy": ("lose", "forget", "work", "wait"),
    "sad": ("find", "meet", "eat", "sing", "dance", "visit", "swim"),
    "sick": ("sleep", "drink", "eat"),
    "hungry": ("eat", "drink"),
}
