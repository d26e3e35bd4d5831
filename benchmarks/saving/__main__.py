from benchmarks.saving.measure import main

main()
