"""Plain words that prompts are made of."""

_TEXT = """
apple basket river stone window yellow market garden winter summer doctor teacher bridge
letter pocket silver copper forest island valley mountain harbour station corner kitchen
table candle mirror pencil paper number morning evening answer question reason story travel
carry follow gather listen measure notice open paint reach sail teach under visit wander
above below between during against around before after never often always maybe quiet loud
bright narrow heavy gentle clever honest simple sudden common modern ancient hidden broken
seven twelve forty hundred thousand second minute hour month year people children village
"""
WORDS = tuple(_TEXT.split())
