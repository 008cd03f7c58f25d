#!/usr/bin/env bash
# The results that are committed under benchmarks/results/, measured again: `benchmarks/measure.sh FOLDER [NAME...]`.
# FOLDER lies on the disk to measure and keeps reports and plots; what is committed is each results.json, as NAME.json.
# A NAME that has results already goes on where it stopped. All of it takes some hours; nothing else may run beside it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
mkdir -p "$folder"
cd "$folder"
# By its name alone it stands in the results.
cp "$here/full.json" .

run() {
	local name=$1
	shift
	if [ "${#wanted[@]}" -gt 0 ] && ! printf '%s\n' "${wanted[@]}" | grep -qx -- "$name"; then return; fi
	echo "$(date +%H:%M:%S) $name"
	if [ -e "$name/results.json" ]; then
		tensorkeep bench checkpoint --resume --out "$name" >"$name.txt"
	else
		tensorkeep bench checkpoint --out "$name" "$@" >"$name.txt"
	fi
	cp "$name/results.json" "$here/results/$name.json"
}

wanted=("$@")
part=openllama-3b:first-100
small=openllama-3b:first-5
run a-a-control --experiment peers --arms pytorch --model $part:bfloat16 --runs 10
run peers-bfloat16 --experiment peers --model $part:bfloat16 --runs 5
run peers-float16 --experiment peers --model $part:float16 --runs 3
run six-way-float16 --experiment six-way --model $part:float16 --slow-model $small:float16 --runs 3
run six-way-bfloat16 --experiment six-way --model $part:bfloat16 --slow-model $small:bfloat16 --runs 3
run isolated-float16 --experiment isolated --model $part:float16 --slow-model $small:float16 --runs 3
run isolated-bfloat16 --experiment isolated --model $part:bfloat16 --slow-model $small:bfloat16 --runs 3
run from-baseline-to-tensorkeep --experiment from-baseline-to-tensorkeep --model $small:float16 --runs 3
run claims --experiment claims --runs 5
run full --experiment full.json --model openllama-3b:float16 --runs 3
