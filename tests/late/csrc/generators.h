// Random numbers: a seed and an offset for each device, as CUDA's generators have them.
#pragma once

#include "settings.h"

namespace late {

at::Generator new_generator(int device);
const at::Generator& default_generator(int device);
/// Return a generator of the CPU for one operator, and advance the offset.
at::Generator drawn_from(at::Generator own);

}  // namespace late
