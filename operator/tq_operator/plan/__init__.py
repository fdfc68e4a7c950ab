"""Pure: a TransferQueue and what is seen of its children -> the wanted children and the status. No I/O, no clock."""
