from transfer_queue.cli import main

main()
