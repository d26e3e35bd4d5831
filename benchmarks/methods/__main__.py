from benchmarks.methods.sweep import main

main()
