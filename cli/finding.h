// One line of `fsdp doctor`: what was found, why it matters, what to do.
#pragma once

#include <string>
#include <vector>

namespace fsdp {

enum class Verdict { kOk, kWarn, kFail };

struct Finding {
  Verdict verdict = Verdict::kOk;
  std::string id;           // "shm"
  std::string found;        // on this machine
  std::string why = {};     // empty where all is well
  std::string remedy = {};  // empty where all is well
};

// "WARN shm: 64 MiB in /dev/shm -> ... -> ..."
std::string to_text(const Finding& finding);
// A JSON array of all of them.
std::string to_json(const std::vector<Finding>& findings);
// What to_json gave. Throws InvalidArgument for anything else.
std::vector<Finding> parse_findings(const std::string& json);
Verdict worst_of(const std::vector<Finding>& findings);

}  // namespace fsdp
