// The boxed fallback of the spare dispatch key: sees every operator that is given a parameter, makes the parameter
// readable while the operator runs, and passes on what only makes views or reads metadata. Registered when the library
// is loaded.
//
// NOTE [Guard rule]
// The key sits above autograd. An operator that returns an alias, or reads metadata only, is redispatched unguarded:
// whatever it is made of comes back here if it reads. Every other operator, composites included, makes its units
// resident, pins them, and runs with the key excluded, so that only the outermost operator owns a use; nothing is
// freed under it.
#pragma once

#include <string_view>

namespace fsdp {

enum class TouchTreatment {
  kPass,    // views and metadata
  kUse,     // reads or writes data
  kRefuse,  // would give a parameter another storage or shape
};

// How the fallback treats an operator by its schema; for tests. Throws InvalidArgument for an unknown operator.
TouchTreatment touch_treatment(std::string_view operator_name, std::string_view overload);

}  // namespace fsdp
