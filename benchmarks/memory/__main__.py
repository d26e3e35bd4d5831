from benchmarks.memory.measure import main

main()
